"""Where text comes from: a file, a folder, the Python standard library, the Hugging Face Hub."""
import errno
import hashlib
import json
import os
import re
import shutil
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from configurator import fail

HUB = 'hf://datasets/'
REPOSITORY = re.compile(r'([^/@]+(?:/[^/@]+)?)(?:@(refs/\w+/\w+|[^/]+))?(?:/(.+))?')
SUFFIXES = ('.parquet', '.jsonl', '.jsonl.zst', '.jsonl.gz', '.txt')
SPLIT_NAMES = {'train': 'train', 'valid': 'val', 'val': 'val', 'validation': 'val', 'test': 'test'}
SPLIT_IN_PATH = re.compile(rf'(?:^|/)({"|".join(SPLIT_NAMES)})(?=[/._-])')
NOT_BUILTIN = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}


class File(NamedTuple):
    name: str  # below the source's folder
    size: int  # bytes
    changed: int = 0  # when, in nanoseconds; 0 on the Hub, where a commit never changes
    split: str | None = None  # the source's own: train, val, test


@dataclass
class Source:
    """Files of documents, in the order they are read."""
    name: str  # a path, 'builtin', or hf://datasets/OWNER/NAME@COMMIT
    folder: str  # where the files are, or are downloaded to
    files: list[File]
    left_out: list[str] = field(default_factory=list)  # files of other kinds

    def listing(self) -> str:
        """A digest of the files' names, sizes and times: another says that the input changed."""
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()

    def fetch(self, file: File) -> Future:
        """The path of a file, once it is there."""
        path = os.path.join(self.folder, file.name)
        if not self.name.startswith(HUB):
            here: Future = Future()
            here.set_result(path)
            return here
        repo, commit, _ = parse_hub(self.name)
        return in_thread(ask_hub, repo, lambda api: api.hf_hub_download(
            repo, file.name, repo_type='dataset', revision=commit, local_dir=self.folder))

    def paths(self, first: int, wanted: Callable[[File], bool]) -> Iterator[tuple[int, str]]:
        """(number, path) of the wanted files from number `first` on. While one is read, the next
        is downloaded."""
        ready: tuple[int, Future] | None = None
        for number in range(first, len(self.files)):
            if not wanted(self.files[number]):
                continue
            coming = number, self.fetch(self.files[number])
            if ready:
                yield ready[0], ready[1].result()
            ready = coming
        if ready:
            yield ready[0], ready[1].result()

    def release(self, file: File) -> None:
        """A downloaded file is not kept once its tokens are safe."""
        if self.name.startswith(HUB):
            os.remove(os.path.join(self.folder, file.name))

    def close(self) -> None:
        """Nor is the folder of downloads, once all is done."""
        if self.name.startswith(HUB):
            shutil.rmtree(self.folder, ignore_errors=True)


def find_source(where: str, seed: int, downloads: str) -> Source:
    """The files of a --input: its own held-out splits first, then by name, or shuffled where there
    is a seed. Those of the Hub are downloaded to `downloads`. SystemExit where there are none."""
    name, folder, left_out = where, where, []
    if where.startswith(HUB):
        name, files, left_out = list_hub(where)
        folder = downloads
    elif where == 'builtin':
        folder = sysconfig.get_paths()['stdlib']
        files, _ = list_folder(folder, ('.py',), NOT_BUILTIN)
    elif os.path.isdir(where):
        files, left_out = list_folder(where, SUFFIXES, set())
    elif os.path.isfile(where):
        folder, base = os.path.split(where)
        files = [look_at_file(where, base)] if base.lower().endswith(SUFFIXES) else []
    else:
        fail(f'input={where}: no such file or folder; the Hub is {HUB}OWNER/NAME')
    if not files:
        fail(f'input={where} holds no {", ".join(SUFFIXES)} file')
    files = [file._replace(split=split_in_path(file.name)) for file in files]
    # a folder that happens to be called test
    if where == 'builtin' or not any(file.split == 'train' for file in files):
        files = [file._replace(split=None) for file in files]
    if seed:
        files.sort(key=lambda file: hashlib.sha256(f'{seed}:{file.name}'.encode()).digest())
    files.sort(key=lambda file: file.split not in ('val', 'test'))
    return Source(name, folder, files, left_out)


def split_in_path(name: str) -> str | None:
    match = SPLIT_IN_PATH.search(name)
    return SPLIT_NAMES[match[1]] if match else None


def list_folder(root: str, suffixes: tuple[str, ...], skip: set[str],
                ) -> tuple[list[File], list[str]]:
    """The files below a folder with these suffixes, a folder's own before those of its folders, by
    name; and the names of all others. Hidden ones are passed over. A link to a folder is followed
    where that is elsewhere, and once: within `root` its files are met in their own place."""
    def stop(error: OSError) -> None:
        raise error

    files, left_out = [], []
    top = os.path.realpath(root)
    seen = {top}
    for folder, subfolders, names in os.walk(root, onerror=stop, followlinks=True):
        inside = []
        for name in sorted(set(subfolders) - skip):
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            elsewhere = not real.startswith(os.path.join(top, ''))
            if not name.startswith('.') and real not in seen and (
                    elsewhere or not os.path.islink(path)):
                seen.add(real)
                inside.append(name)
        subfolders[:] = inside
        for name in sorted(name for name in names if not name.startswith('.')):
            path = os.path.join(folder, name)
            # isfile: a pipe would be waited for, for ever
            if name.lower().endswith(suffixes) and os.path.isfile(path):
                files.append(look_at_file(path, os.path.relpath(path, root)))
            else:
                left_out.append(os.path.relpath(path, root))
    return files, left_out


def look_at_file(path: str, name: str) -> File:
    status = os.stat(path)
    return File(name, status.st_size, status.st_mtime_ns)


# The Hub

def parse_hub(where: str) -> tuple[str, str | None, str]:
    """Repository, revision and folder of hf://datasets/OWNER/NAME[@REVISION][/FOLDER]."""
    match = REPOSITORY.fullmatch(where.removeprefix(HUB).rstrip('/'))
    if not match:
        fail(f'input={where}: expected {HUB}OWNER/NAME, {HUB}OWNER/NAME@REVISION/FOLDER')
    return match[1], match[2], match[3] or ''


def list_hub(where: str) -> tuple[str, list[File], list[str]]:
    """`where` with the commit it is at now, its files, and the names of files of other kinds."""
    repo, revision, inside = parse_hub(where)
    commit = ask_hub(repo, lambda api: api.dataset_info(repo, revision=revision)).sha
    # of a single file the folder is listed
    folder = os.path.dirname(inside) if inside.lower().endswith(SUFFIXES) else inside
    tree = ask_hub(repo, lambda api: list(api.list_repo_tree(
        repo, folder or None, repo_type='dataset', revision=commit, recursive=True)))
    files, left_out = [], []
    for entry in sorted(tree, key=lambda entry: entry.path):
        if not hasattr(entry, 'size') or (inside != folder and entry.path != inside):
            continue
        if entry.path.lower().endswith(SUFFIXES):
            files.append(File(entry.path, entry.size))
        elif not os.path.basename(entry.path).startswith('.'):
            left_out.append(entry.path)
    return f'{HUB}{repo}@{commit}{"/" * bool(inside)}{inside}', files, left_out


def ask_hub(repo: str, question: Callable[[Any], Any]) -> Any:
    """question(HfApi()); whatever goes wrong ends the program with one line."""
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import disable_progress_bars
    disable_progress_bars()
    api = HfApi()
    try:
        return question(api)
    except errors.GatedRepoError:
        fail(f'{repo} is gated: accept its terms on {api.endpoint}, then give your token in '
             'HF_TOKEN')
    except errors.RevisionNotFoundError:
        fail(f'{repo} on {api.endpoint} has no such revision')
    except errors.RepositoryNotFoundError:
        fail(f'{repo} is not on {api.endpoint}, or is private: check the name, and HF_TOKEN if you '
             'have access')
    except errors.RemoteEntryNotFoundError as error:
        fail(f'{repo} on {api.endpoint} has no such file or folder: {error.response.url.path}')
    except Exception as error:  # the HTTP library's own, too many to name
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        cause = str(error.__cause__ or error).strip().partition('\n')[0]
        fail(f'cannot get {repo} from {api.endpoint}: {cause} (is there a network? the same '
             'command goes on from here)')


def in_thread(function: Callable[..., Any], *args: Any) -> Future:
    """function(*args) in a thread that does not keep the program from ending, as an executor's
    would."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # SystemExit too: the main thread raises it
            future.set_exception(error)
    threading.Thread(target=work, daemon=True).start()
    return future
