#!/bin/bash
# A run on SLURM that survives time limits and pre-emption: sbatch examples/slurm.sh cifar10 --data cifar10.zip --init edm/
#
# Ten minutes before the end SLURM sends USR1. Each node passes it on to its training processes, which finish their step,
# save and stop: with code 0, as torchrun would start them again otherwise. The job then queues itself again and resumes.
# If a node fails, SLURM requeues it (--requeue).
# Ten minutes are enough to write 18 GB, a checkpoint of imagenet64-xl (16 bytes per parameter), at 40 MB/s. For a small
# model, or a fast disk, two are plenty.
#SBATCH --job-name=tcm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append

STOPPED=75  # exit code of a node that was asked to stop

# What runs on each node. torchrun does not forward USR1, so this shell does.
node='
torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:29500" -m -- tcm train "$@" &
torchrun=$!
trap "stopped=1; pkill -USR1 -P $torchrun" USR1
while kill -0 $torchrun 2>/dev/null; do wait $torchrun; code=$?; done
exit $(( ${stopped:-0} ? '$STOPPED' : code ))
'

export HEAD=${SLURMD_NODENAME:-$(hostname)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
srun --kill-on-bad-exit=0 bash -c "$node" node "$@"
code=$?
if [ $code -eq $STOPPED ]; then
    echo "stopped before the end; queueing again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $code
