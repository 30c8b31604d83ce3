"""What Horovod's launcher shares with Ray and Spark."""
