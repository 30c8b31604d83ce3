"""The parts of Horovod's launcher that Ray and Spark use, too."""
