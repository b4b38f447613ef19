// rhea: a dynamic node, ten messages with properties, and their outcomes. Prints what it saw.
import rhea from 'rhea';

const container = rhea.create_container();
const connection = container.connect({
  host: '127.0.0.1', port: Number(process.argv[2]), username: 'guest', password: 'guest', reconnect: false,
});
const found = [];
let accepted = 0;
connection.open_receiver({source: {dynamic: true}});
container.on('receiver_open', ({receiver}) => connection.open_sender(receiver.source.address));
container.once('sendable', ({sender}) => {
  for (let number = 0; number < 10; number++) {
    sender.send({body: `m${number}`, application_properties: {number}});
  }
});
const finish = () => {
  if (accepted === 10 && found.length === 10) {
    console.log(found.join(' '));
    connection.close();
  }
};
container.on('accepted', () => { accepted++; finish(); });
container.on('message', ({message}) => {
  found.push(`${message.body}:${message.application_properties.number}`);
  finish();
});
container.on('disconnected', ({error}) => { console.error(error); process.exit(1); });
