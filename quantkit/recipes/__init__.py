"""Recipes: which linear gets which scheme and method; candidates and the knapsack for a budget."""
