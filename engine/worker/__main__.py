"""`python -m engine.worker`: one engine process."""

from engine.models.library.light_imports import import_transformers

import_transformers()

from engine.worker.process import end, main  # noqa: E402 - see there

end(main())
