"""Attention that does not look at everything: sliding windows and the delta rule, on the projections of MLA or GQA."""
