"""Ways in which the ranks decide what runs next."""
