"""Which linear gets which scheme and method: recipes, candidates, and the knapsack for a budget."""
