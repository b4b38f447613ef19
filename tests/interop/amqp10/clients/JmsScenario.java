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
    TemporaryQueue sq = s.createTemporaryQueue(); MessageProducer sp = s.createProducer(sq);
    for (int i = 0; i < 6; i++) {
      TextMessage x2 = s.createTextMessage("s" + i); x2.setIntProperty("n", i); x2.setJMSType(i % 2 == 0 ? "even" : "odd");
      if (i == 5) x2.setStringProperty("JMSXGroupID", "g"); sp.send(x2);
    }
    StringBuilder seen = new StringBuilder();
    QueueBrowser b = s.createBrowser(sq, "n > 2");
    for (java.util.Enumeration<?> e = b.getEnumeration(); e.hasMoreElements();) seen.append(((TextMessage) e.nextElement()).getText()).append(' ');
    b.close(); say("browsed " + seen);
    MessageConsumer sel = s.createConsumer(sq, "JMSType = 'odd' AND n BETWEEN 1 AND 3");
    say("selected " + ((TextMessage) sel.receive(5000)).getText() + " " + ((TextMessage) sel.receive(5000)).getText() + " " + sel.receiveNoWait());
    sel.close();
    MessageConsumer grp = s.createConsumer(sq, "JMSXGroupID = 'g'"); say("group " + ((TextMessage) grp.receive(5000)).getText()); grp.close();
    try { s.createConsumer(sq, "n = "); say("BAD"); } catch (InvalidSelectorException e) { say("invalid selector"); }
    MessageConsumer nl = s.createConsumer(t, null, true); tp.send(s.createTextMessage("own"));
    say("no local " + nl.receive(200)); nl.close();
    TemporaryTopic tt = s.createTemporaryTopic(); MessageConsumer t1 = s.createConsumer(tt), t2 = s.createConsumer(tt);
    MessageProducer ttp = s.createProducer(tt); ttp.send(s.createTextMessage("all"));
    say("temporary topic " + ((TextMessage) t1.receive(5000)).getText() + " " + ((TextMessage) t2.receive(5000)).getText());
    t1.close(); t2.close(); ttp.close(); tt.delete();
    sp.setDeliveryDelay(300); sp.send(s.createTextMessage("late"));
    sp.setDeliveryDelay(0); sp.send(s.createTextMessage("now"));
    MessageConsumer dc = s.createConsumer(sq, "JMSMessageID IS NOT NULL AND n IS NULL");
    TextMessage now = (TextMessage) dc.receive(5000), late = (TextMessage) dc.receive(5000);
    say("delayed " + now.getText() + " " + late.getText() + " " + (late.getJMSDeliveryTime() <= System.currentTimeMillis())); dc.close();
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
