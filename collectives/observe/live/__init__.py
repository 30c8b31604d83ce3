"""The messages of a rank for the live page of its job."""
