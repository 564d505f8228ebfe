"""The corpus in three folders: val and test of small files only, chosen by their hash."""
import hashlib, os, sys
sys.path.insert(0, '.')
from nanocem.sources import list_corpus
LARGEST, VAL, TEST = 60_000, 3_050_000, 100_000
root = sys.argv[1]
docs = sorted((hashlib.sha256(open(f.name, 'rb').read()).hexdigest(), f) for f in list_corpus())
size = dict(train=0, val=0, test=0)
for name, file in docs:
    small = 500 <= file.size <= LARGEST
    split = 'val' if small and size['val'] < VAL else 'test' if small and size['test'] < TEST else 'train'
    size[split] += file.size
    os.makedirs(f'{root}/{split}', exist_ok=True)
    with open(file.name, 'rb') as a, open(f'{root}/{split}/{name[:16]}.txt', 'wb') as b:
        b.write(a.read())
print(size)
