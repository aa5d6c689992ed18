"""`python -m engine.worker`: run one engine process."""

from engine.worker.process import end, main

end(main())
