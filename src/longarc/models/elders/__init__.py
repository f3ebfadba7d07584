"""What the GLM line did before GLM-4.5: blank infilling, GLM-130B's parts, ChatGLM's checkpoints."""
