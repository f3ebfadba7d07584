"""Ids in, ids with log-probabilities and policy versions out."""
