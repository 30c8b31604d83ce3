"""Estimators of Spark ML, without their frameworks: parameters, the way of a fit, its history and its checkpoints."""
