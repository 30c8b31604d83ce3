"""The rows of a DataFrame on their way into the ranks that train on them."""
