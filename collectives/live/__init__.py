"""What a rank tells the live page of its job."""
