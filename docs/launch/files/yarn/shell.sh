#!/bin/bash
# Runs a script in containers of YARN, each of which is a rank: bash shell.sh train.sh
# The script does what one rank does: source /opt/train/bin/activate && python /shared/train.py
set -euo pipefail

workers=4
folder=/shared/rendezvous # all nodes have it

jar=$(find "$HADOOP_HOME/share/hadoop/yarn" -name 'hadoop-yarn-applications-distributedshell-[0-9]*.jar' | head -n 1)

exec yarn org.apache.hadoop.yarn.applications.distributedshell.Client \
    -jar "$jar" \
    -appname hvd-cluster \
    -shell_script "$1" \
    -num_containers "$workers" \
    -container_memory 4096 \
    -container_vcores 1 \
    -shell_env WORLD_SIZE="$workers" \
    -shell_env HOROVOD_RENDEZVOUS_FOLDER="$folder"
