set -u
for i in $(seq ${WAIT:-500}); do sleep 1; pgrep -f "tiers.py run" > /dev/null || break; done
tail -5 ~/keep/train.log; for l in ~/keep/work/logs/*.log; do echo == $l; tail -c 300 $l; done
cd ~/keep/repo/studies/cifar100/results/long/vit-s; for f in */seed*.json; do cp $f $OUT/$(echo $f | tr / -); done; ls -la $OUT | head -40
