"""Data: from corpora and experts to training documents and conversations."""
