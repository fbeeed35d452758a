// Reads what the server says, as it happens; connects again when it is lost. Paths are relative: a proxy may add to them.

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function askKey() {
  const dialog = document.getElementById("key");
  const input = dialog.querySelector("input");
  input.value = "";
  if (!dialog.open) dialog.showModal();
  await new Promise((closed) => dialog.addEventListener("close", closed, { once: true }));
  sessionStorage.setItem("key", input.value);
}

// An answer of the server, with its key if it asks for one. Throws what the server says.
export async function get(path) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const answer = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      await askKey();
      continue;
    }
    const body = await answer.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${path} answers ${answer.status}`);
  }
}

async function read(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [name, data] = event.split("\n");
      if (data?.startsWith("data: ")) take(name.slice("event: ".length), JSON.parse(data.slice("data: ".length)));
    }
  }
}

// `say(is it connected, why not)`
export async function connect(take, say) {
  for (let wait = 500; ; wait = Math.min(2 * wait, 10000)) {
    try {
      const answer = await get("v1/rollouts/watch");
      say(true, "");
      wait = 250;
      await read(answer.body, take);
      say(false, "the server has ended the feed");
    } catch (error) {
      say(false, error.message);
    }
    await sleep(wait);
  }
}
