"""specbench: which way of drafting pays in speculative decoding, measured so that the answer can be believed."""

__version__ = "0.1.0"
