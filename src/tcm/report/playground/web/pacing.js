// When to compute: never twice at the same time, and always with the newest settings.

/** A function that runs `work`; calls while it runs make it run once more afterwards, and `work` can ask for them. */
export function latestOnly(work) {
  let running = null;
  let again = false;
  async function run() {
    try {
      do {
        again = false;
        await work(() => again);
      } while (again);
    } finally {
      running = null;
    }
  }
  return () => {
    again = true;
    running ??= run();
    return running;
  };
}

/** Counts frames; returns how many there were a second, about twice a second, else null. */
export function frameCounter() {
  let frames = 0;
  let since = performance.now();
  return () => {
    frames += 1;
    const seconds = (performance.now() - since) / 1000;
    if (seconds < 0.5) return null;
    const rate = frames / seconds;
    [frames, since] = [0, performance.now()];
    return rate;
  };
}
