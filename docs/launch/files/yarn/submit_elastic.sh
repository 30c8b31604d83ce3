#!/bin/bash
# An elastic job on YARN, whose executors may be preempted: bash submit_elastic.sh train.py --workers 8 --fewest 2
# Make environment.tar.gz once, with Python and the packages of the job: conda-pack -o environment.tar.gz
set -euo pipefail

workers=8
fewest=2
queue=preemptable # a queue that others may take containers from
label=            # a label of nodes that stay, for the driver; empty: any node

placement=()
if [ -n "$label" ]; then
    placement=(--conf "spark.yarn.am.nodeLabelExpression=$label")
fi

exec spark-submit \
    --master yarn \
    --deploy-mode cluster \
    --queue "$queue" \
    --executor-cores 1 \
    --executor-memory 2g \
    --archives environment.tar.gz#environment \
    "${placement[@]}" \
    --conf spark.yarn.appMasterEnv.PYSPARK_PYTHON=./environment/bin/python \
    --conf spark.executorEnv.PYSPARK_PYTHON=./environment/bin/python \
    --conf spark.executor.memoryOverhead=4g \
    --conf spark.dynamicAllocation.enabled=true \
    --conf spark.shuffle.service.enabled=true \
    --conf spark.dynamicAllocation.initialExecutors="$workers" \
    --conf spark.dynamicAllocation.minExecutors="$fewest" \
    --conf spark.dynamicAllocation.maxExecutors="$workers" \
    --conf spark.speculation=false \
    --conf spark.task.maxFailures=100 \
    --conf spark.executor.maxNumFailures=100 \
    --conf spark.yarn.maxAppAttempts=1 \
    "$@"
