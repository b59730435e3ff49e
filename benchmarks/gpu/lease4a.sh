set -u
mkdir -p ~/keep/site ~/keep/cifar100 ~/keep/repo; for w in .device-data/wheels/*.whl; do python3 -m zipfile -e $w ~/keep/site; done
cp .device-data/cifar/* ~/keep/cifar100/; tar c --exclude=.device-data --exclude=.git . | tar x -C ~/keep/repo
export PYTHONPATH=$HOME/keep/site PYTHONUNBUFFERED=1
H=$PWD/.device-data; cd ~/keep/repo; T=src/vitfocus/kernels/short_attention/triton.py
for c in A C B; do date +%T; cp $H/short_$c.py $T; echo "candidate $c"; if timeout 60 python3 -W ignore $H/check_short.py 2>&1 | tail -20 | cut -c1-200; [ ${PIPESTATUS[0]} = 0 ]; then echo "chosen $c"; break; fi; done
date +%T; timeout 100 python3 -W ignore $H/check_kernels.py 2>&1 | tail -20 | cut -c1-300
date +%T
