from lxml import etree, html

tree = etree.fromstring("<a><b x='1'/><b x='2'/></a>")
assert tree.xpath("sum(//b/@x)") == 3
assert html.fromstring("<p>Hi <b>there</b>").text_content() == "Hi there"
print("ok lxml_parse")
