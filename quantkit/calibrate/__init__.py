"""Methods and recipes: which grid and codes a weight gets. Nothing here sees packed bytes."""
