#!/bin/bash
# Trains in executors of Spark on Kubernetes: bash submit.sh --workers 4 [OPTIONS OF THE SCRIPT...]
# The script comes from a ConfigMap: kubectl create configmap train --from-file=train.py
set -euo pipefail

master=k8s://https://kubernetes.example.com:6443 # kubectl cluster-info shows it
image=registry.example.com/hvd-cluster:spark
executors=4                                      # each has one slot, so one rank
template=executor.yaml                           # executor_spot.yaml for an elastic job on nodes that may go

exec spark-submit \
    --master "$master" \
    --deploy-mode cluster \
    --name train \
    --num-executors "$executors" \
    --executor-cores 1 \
    --executor-memory 1g \
    --conf spark.executor.memoryOverhead=4g \
    --conf spark.kubernetes.namespace=default \
    --conf spark.kubernetes.authenticate.driver.serviceAccountName=spark \
    --conf spark.kubernetes.container.image="$image" \
    --conf spark.kubernetes.driver.podTemplateFile=driver.yaml \
    --conf spark.kubernetes.executor.podTemplateFile="$template" \
    --conf spark.kubernetes.executor.terminationGracePeriodSeconds=60s \
    --conf spark.dynamicAllocation.enabled=false \
    --conf spark.speculation=false \
    --conf spark.decommission.enabled=true \
    --conf spark.storage.decommission.enabled=false \
    --conf spark.task.maxFailures=100 \
    --conf spark.executor.maxNumFailures=100 \
    local:///opt/train/train.py "$@"
