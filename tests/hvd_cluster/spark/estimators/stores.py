"""A store in a folder, with the methods that a fit needs."""

from pathlib import Path


class FolderStore:
    def __init__(self, folder):
        self.folder = str(folder)

    def get_run_path(self, run_id):
        return f"{self.folder}/runs/{run_id}"

    def get_checkpoint_path(self, run_id):
        return f"{self.get_run_path(run_id)}/checkpoint"

    def get_logs_path(self, run_id):
        return f"{self.get_run_path(run_id)}/logs"

    def exists(self, path):
        return Path(path).exists()

    def read(self, path):
        return Path(path).read_bytes()

    def write_bytes(self, path, data):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)
