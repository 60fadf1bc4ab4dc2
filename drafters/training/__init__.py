"""Training of drafters: data in a target's own words, each family's published objective, all on equal terms."""
