// The scenario for MQTT.js, in Node and in a browser: every QoS, properties, a retained message, a resumed session.
"use strict";

const WAIT_MS = 20000;

function check(condition, what) {
  if (!condition) throw new Error(what);
}

// A client whose messages can be awaited one by one.
async function connected(mqtt, url, options) {
  const client = mqtt.connect(url, { protocolVersion: 5, reconnectPeriod: 0, connectTimeout: WAIT_MS, ...options });
  const messages = [];
  let arrived = () => {};
  client.on("message", (topic, payload, packet) => {
    messages.push({ topic, payload: payload.toString(), packet });
    arrived();
  });
  const next = async () => {
    const until = Date.now() + WAIT_MS;
    while (!messages.length) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, Math.max(0, until - Date.now()));
        arrived = () => {
          clearTimeout(timer);
          resolve();
        };
      });
      check(messages.length || Date.now() < until, "no message arrived");
    }
    return messages.shift();
  };
  const connack = await new Promise((resolve, reject) => {
    client.once("connect", resolve);
    client.once("error", reject);
    client.once("close", () => reject(new Error("the connection was closed")));
  });
  return { client, next, connack };
}

async function scenario(mqtt, url, name, options) {
  const durable = { ...options, clientId: name, clean: false, properties: { sessionExpiryInterval: 300 } };
  const first = await connected(mqtt, url, durable);
  check(!first.connack.sessionPresent, "the session exists already");
  const granted = await first.client.subscribeAsync(`${name}/#`, { qos: 2 });
  check(granted[0].qos === 2, "QoS 2 was not granted");
  const properties = {
    contentType: "text/plain",
    responseTopic: "answers",
    correlationData: new TextEncoder().encode("17"),
    userProperties: { unit: "K" },
  };
  for (const qos of [0, 1, 2]) {
    await first.client.publishAsync(`${name}/${qos}`, `message ${qos}`, { qos, properties });
    const { topic, payload, packet } = await first.next();
    check(topic === `${name}/${qos}` && payload === `message ${qos}` && packet.qos === qos, `QoS ${qos}: ${topic}`);
    check(packet.properties.contentType === "text/plain", "the content type is missing");
    check(packet.properties.responseTopic === "answers", "the response topic is missing");
    check(packet.properties.correlationData.toString() === "17", "the correlation data are missing");
    check(packet.properties.userProperties.unit === "K", "the user property is missing");
  }

  await first.client.publishAsync(`${name}/kept`, "retained", { qos: 1, retain: true });
  check(!(await first.next()).packet.retain, "a live message has the retain flag");
  const other = await connected(mqtt, url, { ...options, clientId: `${name}-other` });
  await other.client.subscribeAsync(`${name}/kept`, { qos: 1 });
  const kept = await other.next();
  check(kept.payload === "retained" && kept.packet.retain, "the retained message is missing");

  await first.client.endAsync();
  await other.client.publishAsync(`${name}/offline`, "while away", { qos: 1 });
  const second = await connected(mqtt, url, durable);
  check(second.connack.sessionPresent, "the session was lost");
  check((await second.next()).payload === "while away", "the offline message is missing");
  await second.client.endAsync();
  await other.client.endAsync();
}

globalThis.scenario = scenario;
