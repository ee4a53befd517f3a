tar xJf .carry/rest.txz -C /tmp/site
export PYTHONPATH=src:.:/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages PYTHONUNBUFFERED=1
B="python -W ignore -m benchmarks --pause 0.1 --turns 3 --no-check"
timeout 170 $B --providers rowmax cudnn fa4 --cells "d=96|80 n=16384 causal=0|1" "d=192 dv=128 hq=16 n=16384 causal=0|1" "d=128 causal=1 packed=2048+2048+2048+2048+2048+2048+2048+2048+2048+2048+2048+2048+2048+2048+2048+2048|73+1980+328+850+361+511+375+1682+219+1580+1174+5864+2613+5035+6306+3817" --passes forward backward --seconds 150 --csv $OUT/between.csv > $OUT/between.txt 2>&1
timeout 100 $B --providers rowmax cudnn flash fa4 --cells "b=64 n=197 hq=12 d=64" "b=256 n=77 hq=12 d=64 causal=1" "b=8 n=128 hq=12 d=64" "b=512 n=64 hq=12 d=64" "b=8 n=77 nq=4096 hq=8 d=40" --passes forward backward --seconds 85 --csv $OUT/small.csv > $OUT/small.txt 2>&1
for f in between small; do cut -c1-110 $OUT/$f.txt | tail -85; done
