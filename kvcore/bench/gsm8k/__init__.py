from kvcore.bench.gsm8k.task import GSM8K

__all__ = ["GSM8K"]
