// qpid-jms: temporary queues, durable and shared subscriptions, transactions. Prints what it saw.
import jakarta.jms.*;
import org.apache.qpid.jms.*;
public class JmsScenario {
  static void say(String s){ System.out.println(s); }
  public static void main(String[] a) throws Exception {
    String url = "amqp://127.0.0.1:" + a[0];
    JmsConnectionFactory f = new JmsConnectionFactory("guest","guest",url);
    f.setPopulateJMSXUserID(false);
    Connection c = f.createConnection(); c.setClientID("jms-client"); c.start();
    Session s = c.createSession(false, Session.AUTO_ACKNOWLEDGE);
    TemporaryQueue tq = s.createTemporaryQueue(); 
    MessageProducer p = s.createProducer(tq);
    TextMessage m = s.createTextMessage("hello"); m.setStringProperty("color","red"); p.send(m);
    MessageConsumer mc = s.createConsumer(tq);
    TextMessage r = (TextMessage) mc.receive(5000); say("got " + r.getText() + " " + r.getStringProperty("color"));
    mc.close(); p.close(); tq.delete(); say("temp deleted");
    Topic t = s.createTopic("jms.news");
    MessageConsumer d = s.createDurableSubscriber(t, "sub1");
    MessageProducer tp = s.createProducer(t);
    s.createProducer(s.createTopic("jms.nobody")).send(s.createTextMessage("unheard"));
    tp.send(s.createTextMessage("one"));
    say("durable " + ((TextMessage) d.receive(5000)).getText());
    d.close();
    tp.send(s.createTextMessage("two"));
    d = s.createDurableSubscriber(t, "sub1");
    say("durable " + ((TextMessage) d.receive(5000)).getText());
    d.close(); s.unsubscribe("sub1"); say("unsubscribed");
    try { s.unsubscribe("sub1"); say("BAD"); } catch (InvalidDestinationException e) { say("unknown"); }
    MessageConsumer sh1 = s.createSharedConsumer(t, "shared1"), sh2 = s.createSharedConsumer(t, "shared1");
    tp.send(s.createTextMessage("s"));
    Message x = sh1.receive(1000); Message y = sh2.receive(1000); say("shared " + ((x==null) != (y==null)));
    sh1.close(); sh2.close();
    MessageConsumer sd = s.createSharedDurableConsumer(t, "shared2"); tp.send(s.createTextMessage("sd"));
    say("shared durable " + ((TextMessage) sd.receive(5000)).getText()); sd.close(); s.unsubscribe("shared2");
    Session tx = c.createSession(true, Session.SESSION_TRANSACTED);
    TemporaryQueue q = tx.createTemporaryQueue();
    MessageProducer txp = tx.createProducer(q); MessageConsumer txc = tx.createConsumer(q);
    txp.send(tx.createTextMessage("a")); tx.rollback();
    say("rolled back " + (txc.receive(500) == null));
    txp.send(tx.createTextMessage("b")); tx.commit();
    say("committed " + ((TextMessage) txc.receive(5000)).getText()); tx.rollback();
    TextMessage again = (TextMessage) txc.receive(5000); say("again " + again.getText() + " " + again.getJMSRedelivered()); tx.commit();
    c.close(); say("closed");
  }
}
