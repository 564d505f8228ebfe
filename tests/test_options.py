"""Options together: each config file, and random sets of options, train on real tensors."""
import random
from pathlib import Path

import pytest

import train
from running import BATCH, LENGTH, MODEL_FILES, SIZE_FILES, override, result, steps, write_data

SIZE = ('--d_model=8 --n_layer=2 --n_head=2 --d_mlp=8 --eval_tokens=64 --test_tokens=64 '
        f'--context_length={LENGTH} --batch_size={BATCH} --micro_batch_size=2 --device=cpu '
        '--compile=False --tensorboard=False --sample_tokens=0 --eval_interval=10').split()
# Values that options may have, some of them wrong, alone or beside others
VALUES = {
    'attn': 'llama cem', 'mlp': 'llama cem', 'tie': 'none kv qo both', 'attn_steps': '1 2 0',
    'mlp_steps': '1 3', 'attn_reuse': '1 2', 'mlp_reuse': '1 2 0',
    'attn_step_size': '0.5 -1', 'mlp_step_size': '0.1', 'positions': 'alibi rope',
    'kq_diag': 'none shared per_head', 'score_scale': 'head model', 'residual': 'raw normed',
    'preconditioner': 'none diag diag_lowrank', 'attn_rank': '1 4', 'mlp_rank': '2 16',
    'exact_update': 'True False', 'untied_output': 'True False', 'mlp_match': 'dims params',
    'mlp_energy': 'gated sign_convex', 'init_std': '0.1 0', 'rope_theta': '100 1e4',
    'd_model': '8 12 9', 'n_head': '1 2 3', 'n_kv_head': '1 2 3',
    'vocab_size': '257 300 7', 'optimizer': 'adamw muon sgd', 'warmup': '0 0.5 1', 'beta1': '0 1',
    'learning_rate': '0 1e-2 nan', 'weight_decay': '0 1', 'grad_clip': '0 1 1e-3', 'seed': '0 7 -1',
    'micro_batch_size': '1 2 3 4', 'dtype': 'float32 bfloat16 float16', 'final_lr': '0 1 2',
    'kernels': 'True False', 'log_interval': '1 3', 'tokens': '64 1 0',
    'eval_tokens': '1 300', 'sample_tokens': '0 3', 'stop_step': '1 9', 'adam_eps': '1e-9 0'}


@pytest.mark.parametrize('file', [*MODEL_FILES, *SIZE_FILES])
def test_each_config_file_trains(file: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / 'o'
    options = [file, *SIZE, '--vocab_size=2048', f'--data={data}', f'--out_dir={out}', steps(2)]
    assert train.main(options) == 0
    assert result(out)['steps'] == 2 and 1 < result(out)['test_loss'] < 20


def test_fine_tuning_trains(data: Path, tmp_path: Path) -> None:
    first, out = tmp_path / 'first', tmp_path / 'o'
    common = [*SIZE, f'--data={data}']
    assert train.main([*common, f'--out_dir={first}', steps(1)]) == 0
    assert train.main(['config/finetune.py', *common, f'--init_from={first}', f'--out_dir={out}',
                       steps(2)]) == 0
    assert result(out)['steps'] == 2


@pytest.mark.parametrize('seed', range(2))
def test_options_take_a_step_or_are_refused_in_one_line(
    seed: int, tmp_path: Path
) -> None:
    """Twenty-five random sets of up to five options for each seed."""
    data = write_data(tmp_path / 'data', vocab_size=257)  # with all bytes: it can be sampled
    rng = random.Random(seed)
    taken = refused = 0
    for n in range(25):
        names = rng.sample(sorted(VALUES), rng.randint(1, 5))
        options = [f'--{name}={rng.choice(VALUES[name].split())}' for name in names]
        try:
            code = train.main(override([*SIZE, f'--data={data}', steps(2),
                                        f'--out_dir={tmp_path / str(n)}'], *options))
            assert code in (0, train.STOPPED), options
            taken += 1
        except SystemExit as error:
            assert isinstance(error.code, str) and '\n' not in error.code, options
            refused += 1
        except Exception as error:
            raise AssertionError(f'{options}: {error!r}') from error
    assert taken > 3 and refused > 3
