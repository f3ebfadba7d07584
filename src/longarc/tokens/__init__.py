"""Text to ids and back: tokenizers, chat formats at token level, tool-call parsing. No torch."""
