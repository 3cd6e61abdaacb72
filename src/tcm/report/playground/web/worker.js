// The worker: it holds the network and evaluates f for whoever asks, one batch after the other.

let runtime = null;
let session = null;
let last = Promise.resolve();

self.onmessage = ({ data }) => {
  last = last.then(() => answer(data));
};

async function answer({ id, start, batch }) {
  try {
    if (start) await load(start);
    self.postMessage({ id, x: batch && (await evaluate(batch)) });
  } catch (error) {
    self.postMessage({ id, error: String(error.message ?? error) });
  }
}

async function load({ code, wasm, graph }) {
  const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  runtime = await import(address);
  runtime.env.wasm.numThreads = 1; // more need a server that isolates the page
  runtime.env.wasm.wasmBinary = wasm;
  session = await runtime.InferenceSession.create(new Uint8Array(graph));
}

/** f(x, t) for images x of a shape (batch, channels, height, width), and class weights (batch, classes) or null. */
async function evaluate({ x, shape, t, classes }) {
  const count = shape[0];
  const inputs = {
    x: new runtime.Tensor("float32", x, shape),
    t: new runtime.Tensor("float32", new Float32Array(count).fill(t), [count]),
  };
  if (classes) inputs.classes = new runtime.Tensor("float32", classes, [count, classes.length / count]);
  const { images } = await session.run(inputs);
  return images.data;
}
