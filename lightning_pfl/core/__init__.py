"""Words and arithmetic that everything else uses; knows no Trainer, method or engine."""
