// RocketMQ's Node.js client against a broker: node scenario.js PORT
const { ConsumeResult, LitePushConsumerImpl, Producer, PushConsumer, SimpleConsumer } = require('rocketmq-client-nodejs');

const endpoints = `127.0.0.1:${process.argv[2]}`;
const topic = 'node';

async function received(consumer, wanted) {
  const found = [];
  while (found.length < wanted) {
    for (const message of await consumer.receive(16, 30000)) {
      found.push(`${message.body.toString()}:${message.tag}`);
      await consumer.ack(message);
    }
  }
  return found;
}

async function main() {
  const producer = new Producer({ namespace: '', endpoints, topics: [topic] });
  await producer.startup();
  for (let number = 0; number < 5; number++) {
    await producer.send({ topic, tag: number % 2 ? 'odd' : 'even', keys: [`k${number}`], body: Buffer.from(`m${number}`) });
  }
  const late = await producer.send({ topic, tag: 'late', delay: 60000, body: Buffer.from('late') });
  const recalled = await producer.recallMessage(topic, late.recallHandle);
  console.log('recalled', recalled.messageId === late.messageId);

  const consumer = new SimpleConsumer({
    namespace: '',
    endpoints,
    consumerGroup: 'node-simple',
    subscriptions: new Map().set(topic, '*'),
    awaitDuration: 5000,
  });
  await consumer.startup();
  console.log((await received(consumer, 5)).sort().join(' '));

  const pushed = [];
  let finish;
  const finished = new Promise(resolve => { finish = resolve; });
  const push = new PushConsumer({
    namespace: '',
    endpoints,
    consumerGroup: 'node-push',
    subscriptions: new Map([[topic, 'odd']]),
    messageListener: {
      async consume(message) {
        pushed.push(message.body.toString());
        if (pushed.length === 2) finish();
        return ConsumeResult.SUCCESS;
      },
    },
  });
  await push.startup();
  await finished;
  console.log(pushed.sort().join(' '));

  const lites = [];
  let complete;
  const completed = new Promise(resolve => { complete = resolve; });
  const lite = new LitePushConsumerImpl({
    namespace: '',
    endpoints,
    consumerGroup: 'node-lite',
    bindTopic: topic,
    messageListener: {
      async consume(message) {
        lites.push(`${message.liteTopic} ${message.body.toString()}`);
        if (lites.length === 3) complete();
        return ConsumeResult.SUCCESS;
      },
    },
  });
  await lite.startup();
  await lite.subscribeLite('room');
  for (let number = 0; number < 3; number++) {
    await producer.send({ topic, liteTopic: 'room', body: Buffer.from(`lite ${number}`) });
  }
  await completed;
  console.log(lites.join(', '));
  process.exit(0);
}

main().catch(error => {
  console.error(error);
  process.exit(1);
});
