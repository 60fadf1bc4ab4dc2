"""A page of many runs, in one HTML file that needs nothing else: see ``python -m specbench.report --help``.

Python computes all of it; the page's scripts draw what they are given.
"""
