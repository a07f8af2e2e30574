#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --requeue --signal=B:TERM@300
# One elastic agent per node, which srun leaves running when another node is lost (--kill-on-bad-exit=0). Before the
# allocation ends Slurm asks this script to end: the ranks keep their state, and the job is put into the queue again.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 --no-kill dsx launch --no_ssh --elastic_training --num_procs "${PROCS:-1}" \
    --min_elastic_nodes 1 --max_elastic_nodes "$SLURM_JOB_NUM_NODES" --master_addr "$first" \
    --master_port "${PORT:-29400}" "${SCRIPT:-train.py}" --out "${OUT:-runs/elastic}" --steps "${STEPS:-50}" &
job=$!
asked=0
trap 'asked=1; kill -TERM $job' TERM
wait $job; code=$?
while kill -0 $job 2>/dev/null; do wait $job; code=$?; done # the signal has ended the first wait
[ $asked -eq 1 ] && exec scontrol requeue "$SLURM_JOB_ID"
exit $code
