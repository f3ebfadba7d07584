"""The mathematics of the recipe: pure functions, one idea per file."""
