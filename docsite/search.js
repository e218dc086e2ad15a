// The first hits of a built site's search, by the search's own worker: node search.js WORKER INDEX QUERY...
const fs = require("fs");
const vm = require("vm");

const [worker, index, ...queries] = process.argv.slice(2);
const answers = [];
let handle;
const self = {
  console,
  addEventListener: (_, listener) => { handle = listener; },
  postMessage: (message) => answers.push(message),
};
self.self = self.globalThis = self;
vm.runInNewContext(fs.readFileSync(worker, "utf8"), self);

(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
  await handle({ data: { type: 0, data: { config, docs, options: {} } } });
  answers.length = 0;
  for (const query of queries) await handle({ data: { type: 2, data: query } });
  console.log(JSON.stringify(answers.map(({ data }) => data.items.slice(0, 3).map((pages) => pages[0].location))));
})();
