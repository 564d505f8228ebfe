#!/usr/bin/env bash
# Size L: 10 layers x 192, 3 heads 64 wide, MLP 512; 4.4 M weights in Llama's layers; one GPU. On an
# H100, under CUDA's multi-process service, five of the first six runs ended within ten minutes.
#
#     bash results/tokens/size_l.sh text FOLDER     makes size_l_text/ of FOLDER's english.jsonl.zst
#                                                   and english_large.jsonl.zst; no GPU is needed
#     bash results/tokens/size_l.sh                 trains all models side by side into $OUT
#     TOKENS=20K HELD_OUT=20K bash results/tokens/size_l.sh    tries every command, on a CPU, too
#
# The held-out texts are the published ones, so losses are in the unit of results/tokens. Each model
# takes the rate that the power law of sizes S and M gives; the two Llamas also half and twice of it.
#
# Expected before the first run, in % of test perplexity: Llama over Llama with ALiBi +8; CEM
# attention, T = 1, without P over Llama with ALiBi +9; all-CEM, T = 2, with P and the key-query
# diagonal over Llama with ALiBi +16, without both +20; Llama with ALiBi at all-CEM's weights +6.
set -euo pipefail

if [ "${1:-}" = text ]; then
  mkdir -p size_l_text
  python - "$2" <<'PYTHON'
import io, json, sys
import pyarrow
from nanocem.prepare import split_by_hash

LARGE = 166_000_000  # bytes of the larger text: 46 of 60 MB, compressed


def read(name):
    with open(f'{sys.argv[1]}/{name}', 'rb') as file:
        stream = pyarrow.CompressedInputStream(file, 'zstd')
        yield from map(json.loads, io.BufferedReader(stream, 1 << 20))


documents = {'train': [], 'val': [], 'test': []}
for row in read('english.jsonl.zst'):
    documents[split_by_hash(row['text'], 0.05)].append(row['text'])
size = 0
for row in read('english_large.jsonl.zst'):
    size += len(row['text'].encode())
    if size > LARGE:
        break
    if row['source'] != 'scp-tales':
        documents['train'].append(row['text'])
for split, texts in documents.items():
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts).encode()
    with pyarrow.CompressedOutputStream(f'size_l_text/{split}.jsonl.zst', 'zstd') as file:
        file.write(lines)
    print(f'{split}: {len(texts):,} documents, {len(lines):,} bytes')
PYTHON
  exit
fi

out=${OUT:-out/size_l} tokens=${TOKENS:-120M} held_out=${HELD_OUT:-1B}
[ -e data/size_l ] || python prepare_slimpajama.py --input=size_l_text --tokenizer=bpe4096 --out_dir=data/size_l
run() {  # NAME RATE OPTION ...
  local name=$1 rate=$2
  shift 2
  python train.py --n_layer=10 --d_model=192 --n_head=3 --d_mlp=512 --context_length=512 --batch_size=16 \
    --data=data/size_l --tokens="$tokens" --eval_tokens="$held_out" --test_tokens="$held_out" --eval_interval=1M --log_interval=100 \
    --checkpoint_interval=5000 --tensorboard=False --sample_tokens=0 --seed=1 "$@" --learning_rate="$rate" \
    --out_dir="$out/${name}_rate=${rate}_seed=1" > "$out/${name}_rate=$rate.txt" 2>&1 || echo "$name failed"
}
llama='--attn=llama --mlp=llama' alibi='--attn=llama --mlp=llama --positions=alibi'
steps='--attn_steps=2 --mlp_steps=2'
mkdir -p "$out"
run llama 0.0108 $llama &
run llama-alibi 0.00531 $alibi &
run attn-1-none 0.00573 --attn=cem --mlp=llama --kq_diag=shared &
run cem-2 0.00261 $steps --preconditioner=diag_lowrank --kq_diag=shared &
run cem-2-plain 0.00261 $steps &
run llama-alibi-narrow 0.00531 $alibi --d_mlp=234 &
wait
for factor in half twice; do
  [ $factor = half ] && rates=(0.0054 0.00266) || rates=(0.0216 0.0106)
  run llama "${rates[0]}" $llama &
  run llama-alibi "${rates[1]}" $alibi &
done
wait
tail -qn 1 "$out"/*.txt
grep -H bits_per_byte "$out"/*/result.json
