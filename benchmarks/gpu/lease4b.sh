set -u
cp .device-data/cifar/* ~/keep/cifar100/; mkdir -p ~/keep/frost; cp .device-data/frost/* ~/keep/frost/
export PYTHONPATH=$HOME/keep/site PYTHONUNBUFFERED=1
cd ~/keep/repo; export PYTHONPATH=$HOME/keep/repo/src:$HOME/keep/site
setsid nohup python3 -W ignore studies/cifar100/tiers.py run --data ~/keep/cifar100 --work ~/keep/work vit-s/tap-adl/seed2 vit-s/plain/seed3 --at-once 2 > ~/keep/train.log 2>&1 < /dev/null &
sleep 1; for i in $(seq ${WAIT:-85}); do sleep 1; pgrep -f tiers.py > /dev/null || break; done
cat ~/keep/train.log | tail -5; for l in ~/keep/work/logs/*.log; do echo == $l; tail -c 900 $l; done; nvidia-smi --query-gpu=utilization.gpu,power.draw,memory.used --format=csv,noheader
