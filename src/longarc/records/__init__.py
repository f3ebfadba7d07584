"""What crosses a boundary between two parts: plain, immutable data without behaviour or torch."""
