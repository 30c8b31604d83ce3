#!/bin/bash
# Trains in the executors of Spark on YARN: bash submit.sh train.py [ARGUMENTS...]
# Make environment.tar.gz once, with the packages of the job: venv-pack -o environment.tar.gz
set -euo pipefail

workers=4

exec spark-submit \
    --master yarn \
    --deploy-mode cluster \
    --num-executors "$workers" \
    --executor-cores 1 \
    --executor-memory 2g \
    --archives environment.tar.gz#environment \
    --conf spark.pyspark.python=./environment/bin/python \
    --conf spark.executor.memoryOverhead=4g \
    --conf spark.dynamicAllocation.enabled=false \
    --conf spark.speculation=false \
    "$@"
