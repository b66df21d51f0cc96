"""Which of two values of a metric is the better one: known from its name, or stated as ``mode``."""

from __future__ import annotations

import re

from distaccum.errors import ConfigError

MODES = ("min", "max")
# Words of names, in which digits at the end of a word do not matter: top1, map50, rouge2.
_SMALLER = {
    *("loss", "losses", "error", "errors", "err", "perplexity", "ppl", "bits", "bpb", "bpc", "bpw", "nll", "mse"),
    *("rmse", "mae", "mape", "smape", "rmsle", "msle", "wer", "cer", "ter", "eer", "crossentropy", "fid", "kid"),
    *("lpips", "ece", "brier", "kl", "divergence", "distance", "deviation", "hamming", "regret"),
}
_LARGER = {
    *("accuracy", "acc", "f", "fbeta", "auroc", "auc", "auprc", "precision", "recall", "sensitivity", "specificity"),
    *("bleu", "sacrebleu", "chrf", "rouge", "rougel", "rougelsum", "meteor", "iou", "miou", "jaccard", "dice", "map"),
    *("mrr", "ndcg", "hits", "em", "matthews", "mcc", "kappa", "pearson", "spearman", "correlation", "r"),
    *("psnr", "ssim", "snr", "sdr", "similarity", "reward", "return"),
}
# What may stand behind such a word; with any other one there, the result is something else: accuracy_std, loss_scale.
_BEHIND = {
    *("score", "rate", "value", "index", "coefficient", "percent", "pct", "curve", "top", "at", "k", "per", "byte"),
    *("char", "character", "word", "token", "class", "sample", "pixel", "macro", "micro", "weighted", "mean", "avg"),
    *("average", "median", "sum", "total", "overall", "all", "eval", "val", "dev", "test", "train", "l", "lsum"),
}
# With one of these in front a score is turned over, or is another thing, as 1-accuracy or std_accuracy: nobody guesses.
_TURNED = {
    *("negative", "neg", "minus", "inverse", "false", "to", "until", "1", "non", "not", "no", "std", "stddev", "var"),
    *("variance", "delta", "diff", "difference", "gap", "drop", "ratio", "of", "improvement", "reduction"),
}
_WORDS = re.compile(r"[a-z]+[0-9]*|(?<![a-z0-9])1(?=-)")
_NUMBERED = {"f", "r"}  # letters that are a metric's name with a number alone: f1, r2


def known_mode(metric: str) -> str | None:
    """``min`` or ``max``, as the last word of the name that tells has it; None where none does, or another follows it.

    Of ``eval_f1/cat``, a number for a class, the metric's name tells.
    """
    metric = metric.partition("/")[0] if metric.startswith("eval_") else metric
    spelt = metric.replace("mAP", "map").replace("IoU", "Iou")
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", spelt)  # valAccuracy
    words = _WORDS.findall(spaced.lower().replace("cross_entropy", "crossentropy"))
    for word in [] if _TURNED.intersection(words) else reversed(words):
        bare = word.rstrip("0123456789")
        if bare in _SMALLER | _LARGER and not (bare in _NUMBERED and bare == word):
            return "min" if bare in _SMALLER else "max"
        if bare not in _BEHIND and (words[0] != "loss" or bare == "scale"):  # loss_first is a loss by its name
            return None
    return None


def mode_of(key: str, metric: str, mode: str | None) -> str:
    """``mode`` where it is stated, else what the metric's name says.

    Args:
        key: the setting ``mode``, for the message.
        metric: the result's name, such as ``eval_accuracy``.
        mode (min | max): what is stated; None: nothing.

    Raises:
        ConfigError: none is stated for a name that does not tell.
    """
    known = mode or known_mode(metric)
    if known is None:
        problem = f"is not stated, and the name {metric!r} does not say whether a smaller or a larger value is better"
        raise ConfigError(key, None, problem, f"State {key}=min or {key}=max")
    return known
