"""The models as ``nn.Module``s, from ids to final hidden states, with one form for training and inference."""
