"""TensorFlow in jobs of Spark."""
