#!/bin/bash
# A study on SLURM, its variants shared among the tasks of an array: sbatch examples/slurm-study.sh truncation
#
# Each task takes a part of the variants and a GPU. A stage that several parts need is trained by the first that asks for
# it; the others wait. With as many tasks as seeds, parts seldom share a stage. The study's folder must be on a disk that
# all nodes see, and whose file locks work across them (NFS 4, Lustre with flock).
# Ten minutes before the end SLURM sends USR1: the task saves and stops, queues itself again and resumes.
#SBATCH --job-name=tcm-study
#SBATCH --array=1-5
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append

study=$1
shift
tcm study run "$study" --out "studies/$study" --part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@" &
task=$!
trap 'stopped=1; kill -USR1 $task' USR1
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
if [ "${stopped:-0}" = 1 ]; then
    echo "stopped before the end; queueing again"
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    exit 0
fi
exit $code
# When all tasks are done: tcm study report studies/truncation
