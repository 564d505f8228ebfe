#!/bin/bash
# Train on several machines under SLURM, one torchrun each; arguments are train.py's:
#   sbatch docs/slurm.sh config/cem_t2.py --data=/shared/slimpajama --out_dir=/shared/out/cem
# --out_dir is needed: a requeued job finds its run there, and goes on.
#SBATCH --job-name=nanocem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# Your environment, for example: source .venv/bin/activate

out_dir=
for option in "$@"; do
    case $option in --out_dir=*) out_dir=${option#--out_dir=} ;; esac
done
[ -n "$out_dir" ] || { echo 'slurm.sh: give --out_dir=FOLDER, one that all machines see'; exit 1; }

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit --cpus-per-task
# Five minutes before the end: stop after the step, write a checkpoint, queue again. torchrun would
# kill its workers 30 s after SIGTERM, which a validation or a compilation can outlast: hence 240.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.$((try - 1))"
      wait "$srun" || scontrol requeue "$SLURM_JOB_ID"; exit' TERM
for try in 1 2 3; do  # if a process dies, all end: give the command again
    resume=()
    [ ! -e "$out_dir/config.json" ] || resume=(--init_from=resume)
    srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
        --rdzv_backend=c10d --rdzv_endpoint="$host:29500" --rdzv_id="$SLURM_JOB_ID-$try" \
        --shutdown-timeout=240 train.py "$@" "${resume[@]}" &
    srun=$!
    wait "$srun" && exit
done
exit 1
