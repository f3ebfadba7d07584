"""Models whose layers are transformers' own classes, behind the same ports as LongArc's decoders."""
