"""Makes shards of token ids of texts, and the tokenizer that made them, in the current folder: for ``data=tokens``."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

texts = [topics[name] for name in sorted(topics)]  # yours: any list of texts
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
tokenizer.train_from_iterator(texts, trainer)
tokenizer.save("tokenizer.json")

end = tokenizer.token_to_id("<end>")
Path("shards").mkdir(exist_ok=True)
for shard, start in enumerate(range(0, len(texts), 20)):
    ids = [token for one in tokenizer.encode_batch(texts[start : start + 20]) for token in [*one.ids, end]]
    np.array(ids, dtype="<u2").tofile(f"shards/{shard:03}.bin")
